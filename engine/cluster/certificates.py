"""TLS certificates: which processes may connect from other machines.

    ggjit worker --make-certs certs         certs/ca.pem  ca-key.pem  node.pem  node-key.pem
    gg.cluster.connect("tls://10.0.0.2:8790", tls="certs")

Driver and workers show node.pem and accept what ca.pem signed, in both directions.  ca-key.pem signs more nodes and
stays where it was made; the other three go to every machine.
"""
import datetime
import functools
import os
import pathlib
import ssl

from ggjit.ops.core.errors import ParamError, extra

CA, NODE, NODE_KEY = "ca.pem", "node.pem", "node-key.pem"
YEARS = 5


class Certificates:
    """The certificates in a directory.  Errors: ParamError for what is missing or cannot be used."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        missing = [n for n in (CA, NODE, NODE_KEY) if not (self.directory / n).is_file()]
        if missing:
            raise ParamError(f"{directory}: no {', '.join(missing)}; `ggjit worker --make-certs {directory}` makes "
                             f"certificates")
        self.ca, self.node, self.node_key = (str(self.directory / n) for n in (CA, NODE, NODE_KEY))

    def _context(self, protocol):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False          # the CA's signature identifies the peer, not its host name
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.ca)
            context.load_cert_chain(self.node, self.node_key)
        except (ssl.SSLError, OSError) as e:
            raise ParamError(f"{self.directory}: certificates that cannot be used ({e}); make them again with `ggjit "
                             f"worker --make-certs`") from None
        return context

    @functools.cached_property
    def listener_context(self):
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    @functools.cached_property
    def connector_context(self):
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    @property
    def security(self):
        """Dask's own Security object, for its scheduler and workers."""
        files = {f"tls_{role}_{kind}": path for role in ("client", "worker", "scheduler")
                 for kind, path in (("cert", self.node), ("key", self.node_key))}
        return extra("distributed", "cluster").Security(tls_ca_file=self.ca, require_encryption=True, **files)


def certificates(tls):
    """The Certificates that a `tls=` argument names: a directory; None: none."""
    if tls is None or isinstance(tls, Certificates):
        return tls
    if not isinstance(tls, str | os.PathLike):
        raise ParamError(f"tls={tls!r}: expected the directory that `ggjit worker --make-certs` wrote")
    return Certificates(tls)


def make_certificates(directory):
    """A CA of your own, and a certificate it signed for all nodes; returns the paths written.

        gg.cluster.make_certificates("certs")               # copy the folder to every machine

    Private keys can be read by their owner alone.  Errors: ParamError if there are certificates already, MissingExtra.
    """
    extra("cryptography", "cluster")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    path = pathlib.Path(directory)
    if (path / CA).exists():
        raise ParamError(f"{path / CA} exists; nodes that trust it would refuse new ones: choose another directory")
    path.mkdir(parents=True, exist_ok=True)
    name = lambda text: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])     # noqa: E731
    now = datetime.datetime.now(datetime.UTC)
    ca_key, node_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def signed(subject, key, is_ca):
        return (x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("ggjit CA"))
                .public_key(key.public_key()).serial_number(x509.random_serial_number())
                .not_valid_before(now - datetime.timedelta(hours=1))
                .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
                .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
                .sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def private(key):
        return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                 serialization.NoEncryption())
    written = {CA: signed("ggjit CA", ca_key, True), "ca-key.pem": private(ca_key),
               NODE: signed("ggjit node", node_key, False), NODE_KEY: private(node_key)}
    for file, content in written.items():
        mode = 0o600 if file.endswith("key.pem") else 0o644
        with open(os.open(path / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as f:
            f.write(content)
    return [str(path / file) for file in written]

"""A real browser without a window: a page, what a script finds in it, light or dark."""
import base64
import json
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--allow-file-access-from-files", "--virtual-time-budget=20000", "--dump-dom")
# the script's value, or the page's first error, goes into the page, which is then dumped
RUN = """<script>
window.onerror = text => { document.documentElement.dataset.error = text; };
window.addEventListener("load", async () => {
  const found = await (async function () { %s })().catch(e => window.onerror(e.stack));
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
  document.body.append(out);
});
</script>"""


def in_browser(page, script, folder, dark=False, width=1300):
    """What `script`, the body of an async JavaScript function, returns in `page`, a text of HTML; as Python values."""
    if BROWSER is None:
        pytest.skip("no browser: chromium is not installed")
    file = folder / f"page-{'dark' if dark else 'light'}.html"
    file.write_text(page.replace("<head>", "<head>" + RUN % script, 1), encoding="utf-8")
    theme = ("--blink-settings=preferredColorScheme=0",) if dark else ()
    done = subprocess.run([BROWSER, *FLAGS, *theme, f"--window-size={width},4000", file.as_uri()], text=True,
                          capture_output=True, timeout=300)
    error = re.search(r'data-error="([^"]*)"', done.stdout)
    assert error is None, error[1]
    found = re.search(r'<pre id="found">([^<]*)</pre>', done.stdout)
    assert found, f"the script did not end: {done.stdout[-500:]} {done.stderr[-500:]}"
    return json.loads(base64.b64decode(found[1]))

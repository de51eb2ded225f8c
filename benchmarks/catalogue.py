"""Everything that is compared, by section of the table."""
from benchmarks import catalogue_attention, catalogue_models, catalogue_ops, catalogue_products
from benchmarks.work import Graph

SECTIONS = {
    "models": catalogue_models.WORKS,
    "products": catalogue_products.WORKS,
    "ops": catalogue_ops.WORKS,
    "attention": catalogue_attention.WORKS,
}
GRAPHS = {w.key: w for works in SECTIONS.values() for w in works if isinstance(w, Graph)}

"""Where tensors live: free lists, aliasing, offset planners, their judge, and pictures of the result."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")

from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.planners import Layout, plan_offsets
from ggjit.alloc.problem import IN_PLACE_2023, IN_PLACE_OPS, GraphError, GraphPlan
from ggjit.alloc.validate import InvalidPlan, check_graph_plan, check_layout

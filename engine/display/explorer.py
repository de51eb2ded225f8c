"""The page of gg.explore: one piece of HTML with its data and its script, for a notebook cell, a saved file, a site.

Nothing is fetched and no server is asked.  The script is explore.js beside this file; it says what the data look like.
Colours are those of the other pictures (alloc/plots.py); text takes the page's own colour.
"""
import json
import os
import pathlib
import secrets

from ggjit.alloc import plots
from ggjit.core.html_repr import HtmlRepr, escape
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.whole_file import write_whole

SCRIPT = pathlib.Path(__file__).with_name("explore.js")
COLOURS = {"palette": plots.PALETTE, "other": plots.OTHER, "live": plots.LIVE, "bound": plots.BOUND, "rim": plots.RIM,
           "lifetimes": [(None if most == float("inf") else most, *key) for most, key in plots.lifetimes(0).items()]}
STYLE = """
.gx{position:relative;max-width:940px;font:13px sans-serif;color:inherit}
.gx label{margin-right:18px;white-space:nowrap}
.gx button{font:inherit;color:inherit;background:transparent;border:1px solid rgba(128,128,128,.7);border-radius:4px;
 padding:1px 8px;margin:0 2px;cursor:pointer}
.gx button[aria-pressed=true]{background:rgba(128,128,128,.35);font-weight:bold}
.gx input[type=range]{vertical-align:middle;width:130px}
.gx input[data-part=step]{width:300px}
.gx a{color:inherit;text-decoration:underline dotted;cursor:pointer}
.gx table{border-collapse:collapse;font-size:12px;margin:4px 0;width:auto;color:inherit}
.gx.gx th,.gx.gx td{border:0;border-bottom:1px solid rgba(128,128,128,.35);padding:1px 8px;color:inherit;
 text-align:left!important;background:transparent!important;vertical-align:top;overflow-wrap:anywhere}
.gx.gx .gx-values td{text-align:right!important;font-family:monospace;white-space:nowrap}
.gx .gx-key{margin-right:14px;white-space:nowrap;font-size:11px}
.gx .gx-key i{display:inline-block;margin-right:5px;vertical-align:middle}
.gx .gx-bar{margin:5px 0}
.gx .gx-two{display:flex;flex-wrap:wrap;gap:8px 28px}
.gx .gx-near{display:block;margin:6px 0;max-width:100%}
.gx .gx-tip{position:absolute;display:none;z-index:9;white-space:pre-wrap;max-width:320px;background:#fff;color:#000;
 border:1px solid #767676;border-radius:4px;padding:4px 7px;font-size:11px;pointer-events:none}
"""
BODY = """
<b>{title}</b> <span data-part="numbers"></span>
<div class="gx-bar" data-part="axes"></div>
<div data-part="picture">This view needs JavaScript; in a notebook, trust it and run the cell.</div>
<div class="gx-bar"><span data-part="legend"></span></div>
<div class="gx-bar"><button data-do="back" title="one step back">&#9664;</button>
<input type="range" data-part="step" min="0" max="0" value="0" aria-label="step">
<button data-do="on" title="one step on">&#9654;</button> <button data-do="peak">to the peak</button>
<span data-part="where"></span> <button data-do="in" title="closer">+</button>
<button data-do="out" title="further away">&#8722;</button> <button data-do="whole">whole</button>
<small>drag over the picture to come closer, Ctrl and wheel, double click for the whole</small></div>
<div class="gx-two"><div data-part="node" style="flex:1 1 330px"></div><div data-part="near"></div>
<div data-part="alive"></div></div>
<div class="gx-tip" data-part="tip"></div>
"""


class Explorer(HtmlRepr):
    """What gg.explore returns: `save(file)` writes a page, `.nbytes` is its size, notebooks show it."""

    def __init__(self, data, title):
        self.title, self.n_plans = title, len(data["plans"])
        # no "<" in the text, so that no name can end the script element
        self._data = json.dumps(data | COLOURS, separators=(",", ":")).replace("<", "\\u003c")

    def html(self):
        """The view as one piece of HTML."""
        mark = secrets.token_hex(8)             # the element may be shown twice on a page, so its id is random
        script = SCRIPT.read_text("utf-8")
        return (f"<div class='gx' data-gx='{mark}'>{BODY.format(title=escape(self.title))}</div><style>{STYLE}</style>"
                f"<script>(function () {{\n{script}\nconst data = {self._data};\n"
                f"document.querySelectorAll(\"[data-gx='{mark}']:not([data-ready])\").forEach(function (root) {{\n"
                f"root.dataset.ready = ''; ggjitExplore(root, data); }});\n}})();</script>")

    _repr_html_ = html

    @property
    def nbytes(self):
        """Bytes of the HTML."""
        return len(self.html().encode("utf-8"))

    def save(self, file):
        """Write a page that works without a network, light or dark as its reader's system is.

        Errors: ParamError (a name that does not end in .html), OSError.
        """
        file = os.fspath(file)
        if os.path.splitext(file)[1].lower() not in (".html", ".htm"):
            raise ParamError(f"explore: {file!r} must end in .html")
        write_whole(file, ("<!doctype html><html><head><meta charset='utf-8'><title>" + escape(self.title) +
                           "</title><style>:root{color-scheme:light dark}body{margin:12px}</style></head><body>" +
                           self.html() + "</body></html>").encode("utf-8"))

    def __repr__(self):
        return f"<Explorer of {self.n_plans} plans: {self.title}; save('page.html') writes it>"

"""How objects look in a notebook: HTML of every object, drawings of graphs.

Read in this order:

    html                a table of facts for every class
    boxes               what the picture of a graph consists of
    layered_layout      where boxes and arrows lie
    drawing             the picture as SVG, HTML and dot
    explorer            the interactive page of gg.explore, whose script is explore.js
    progress            bars on a terminal; compile_notice: a line while kernels are compiled
    tracebacks          what a notebook shows of a typed error
"""

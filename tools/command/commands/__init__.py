"""One file per command; `-` in its name is `_` here.  The table in parser.py lists them with their line of help.

    EXAMPLES                pairs (command line, what it does) for `ggjit COMMAND --help`
    add_arguments(c)        declares the arguments on the command's parser; paths with c.add_file
    run(args)               prints unless args.json, returns the dict that --json prints
    JSON = False            the command takes no --json
"""

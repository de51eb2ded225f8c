"""The command line: `ggjit COMMAND`.

    main.py         entry: parse, run, exit status
    parser.py       the table of commands, and argparse's parser made from it
    commands/       one file per command: EXAMPLES, add_arguments(c), run(args)
    common.py       options and output that several commands share; texts.py: files of texts, read and written
    helpers.py      processes that compile a model's kernels beside the command
    kernel_pack.py  compiled kernels in one file
    op_page.py      the ops as text, from their specs; support.py asks the devices for types
"""

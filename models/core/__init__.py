"""What all folders of models use: checks of arguments (checks.py), GPT-2's way to write bytes (byte_chars.py),
options as other libraries call them (other_options.py)."""

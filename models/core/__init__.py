"""What all folders of models use: checks of arguments."""

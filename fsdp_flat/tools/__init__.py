"""Floor 6: command-line tools. Nothing in the library imports them."""

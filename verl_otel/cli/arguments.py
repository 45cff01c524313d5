"""Types of arguments that several commands have."""

import argparse


def port(text: str) -> int:
    """A TCP port."""
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is no port: a number from 1 to 65535 is needed")
    return int(text)

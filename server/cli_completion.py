"""`callboard completion SHELL`: prints what makes a shell complete our commands and options."""

import argparse


def completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the script for a shell."""
    import shtab

    print(shtab.complete(parser, shell=shell))
    return 0

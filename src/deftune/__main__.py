"""`python -m deftune`, and the command `deftune`."""

import io
import sys


def main() -> int:
    """The command line; Ctrl-C while it is being imported is no traceback either."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or a locale without UTF-8: \u2588 in place of a block
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from deftune.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("deftune: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())

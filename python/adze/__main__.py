"""`python -m adze COMMAND`: what the program `adze` does with text files, for those who have only Python."""

import sys

from . import skills

COMMANDS = {"skills": skills.main}


def main(arguments):
    if not arguments or arguments[0] not in COMMANDS:
        print(f"python -m adze COMMAND ...: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return COMMANDS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

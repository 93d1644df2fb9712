"""python -m adze.fingerprint: fingerprints of functions, and what of the installed packages is known.

Imported, it is patching/fingerprint.py."""

import sys

from .patching import fingerprint, scan

if __name__ == "__main__":
    given = sys.argv[1:]
    (fingerprint if given and not given[0].startswith("-") else scan).main(given)
else:
    sys.modules[__name__] = fingerprint

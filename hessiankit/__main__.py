"""``python -m hessiankit``."""

import sys

from hessiankit.cli import main

sys.exit(main())

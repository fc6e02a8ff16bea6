"""``python -m hessiankit``."""

import sys

from hessiankit.cli.main import main

sys.exit(main())

"""``python -m vbm_ptm`` is ``vbm-ptm``."""

import sys

from vbm_ptm.cli import main

sys.exit(main())

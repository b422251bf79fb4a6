"""``python -m vbm_ptm`` is ``vbm-ptm``."""

import sys

from vbm_ptm.launch import look_here_last

look_here_last()  # before anything is imported that a file of the current directory could be taken for

from vbm_ptm.cli import main  # noqa: E402

sys.exit(main())

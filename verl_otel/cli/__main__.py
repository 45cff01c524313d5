import sys

from verl_otel.cli import main

sys.exit(main())

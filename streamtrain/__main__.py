"""``python -m streamtrain`` is the command line."""

from streamtrain.cli import main

main()

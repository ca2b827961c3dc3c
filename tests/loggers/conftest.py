"""Trackio reads its folder from the environment when it is first imported: these tests use one of their own."""

import os
import tempfile

os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp(prefix="trackio-"))

"""What holds for all tests."""

import signal

# A shell that starts the tests in the background has them ignore SIGINT, and tests that send it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""Environment variables of TensorFlow's connections to workers.

This module imports neither TensorFlow nor Keras: the variables are set before
TensorFlow is imported, and a worker never imports Keras.
"""

import os

# The time between TensorFlow's attempts to connect again.
RECONNECT_SECONDS = 3


def fail_fast() -> None:
    """Makes calls to a lost worker fail, where TensorFlow would wait for ever.

    Call it before TensorFlow connects. Environment variables that the user has
    set are left as they are.
    """
    os.environ.setdefault("GRPC_FAIL_FAST", "true")
    # By default eager operations go to a worker on a stream, which ignores
    # GRPC_FAIL_FAST and waits.
    os.environ.setdefault("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "false")
    # Requests wait while gRPC tries to connect again.
    option, options = "grpc.min_reconnect_backoff_ms", "TF_GRPC_DEFAULT_OPTIONS"
    given = os.environ.get(options)
    if option not in (given or ""):
        added = f"{option}={1000 * RECONNECT_SECONDS}"
        os.environ[options] = f"{given},{added}" if given else added

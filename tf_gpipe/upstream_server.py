"""TensorFlow's server, without the rest of TensorFlow.

What `upstream` is for Keras and TensorFlow, this is for a process that needs
neither: a worker runs graphs, and all of their operations are in TensorFlow's
libraries. To import its Python takes four times as long, and 150 MB.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import site
import sys
from typing import Any

_TENSORFLOW = "tensorflow"
# Folders of packages in which TensorFlow looks for libraries of devices, and
# where a library may be else.
_PLUGINS = "tensorflow-plugins"
_PLUGIN = "TF_PLUGGABLE_DEVICE_LIBRARY_PATH"


def server() -> Any:
    """Returns the class `tf.distribute.Server`.

    The process has looked for its devices then. TensorFlow is imported as a
    whole where it is there already, where it has libraries of devices to load,
    which it does as it is imported, and where it has no such server alone.
    """
    if _TENSORFLOW not in sys.modules:
        spec = importlib.util.find_spec(_TENSORFLOW)
        if spec and not _has_plugins(spec):
            with contextlib.suppress(ImportError, AttributeError):
                return _server_alone(spec)
    import tensorflow as tf

    tf.config.list_physical_devices()
    return tf.distribute.Server


def _server_alone(spec: importlib.machinery.ModuleSpec) -> Any:
    # The package, which is not run itself. What is imported later finds it as
    # it is.
    sys.modules[_TENSORFLOW] = importlib.util.module_from_spec(spec)
    try:
        from tensorflow.python import pywrap_tfe
        from tensorflow.python import tf2
        from tensorflow.python.training import server_lib
    finally:
        del sys.modules[_TENSORFLOW]
    # Its libraries read both, which `import tensorflow` sets.
    os.environ["TF2_BEHAVIOR"] = "1"
    tf2.enable()
    pywrap_tfe.TF_ListPhysicalDevices()
    return server_lib.Server


def _has_plugins(spec: importlib.machinery.ModuleSpec) -> bool:
    kernels = (
        os.path.join(x, "core", "kernels")
        for x in spec.submodule_search_locations or ()
    )
    plugins = (
        os.path.join(x, _PLUGINS)
        for x in (
            *sys.path,
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    )
    return bool(os.environ.get(_PLUGIN)) or any(
        map(os.path.exists, (*kernels, *plugins))
    )

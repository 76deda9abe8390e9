"""Checks that fail, each in its own way, for the test of the GPU kit."""

import os
import signal

import numpy as np

from tools.gpu.checking import Failed
from tools.gpu.checking import Skipped


def differs(cpu):
    raise Failed("it differs", difference=0.5)


def raises(cpu):
    raise KeyError("x")


def crashes(cpu):
    os.abort()


def hangs(cpu):
    print("still there", flush=True)
    signal.pause()


def takes_all_memory(cpu):
    np.ones(2**50, "uint8")


def skips(cpu):
    raise Skipped("needs a GPU")


def holds(cpu, number):
    return {"number": number, "cpu": cpu}

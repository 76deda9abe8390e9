"""Randomly drawn wrong uses of tf_gpipe: calls and command lines.

values         wrong values of arguments and flags
calls          the calls of the library, with right arguments
command_lines  the commands and trainers, with their flags
outcome        runs a use, and tells a deliberate error from an accident
"""

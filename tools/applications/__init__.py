"""Compares the families of `keras.applications` as pipelines with plain Keras.

trial      tries one family
table      turns the results into a Markdown table
__main__   the command, which tries all families, each in a process of its own
"""

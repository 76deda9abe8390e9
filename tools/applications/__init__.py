"""The families of `keras.applications` as pipelines, compared with plain Keras.

trial      one family, tried in a process of its own
table      what was found, as Markdown
__main__   the command, which tries all of them
"""

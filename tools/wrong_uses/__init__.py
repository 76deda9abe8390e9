"""Wrong uses of tf_gpipe, drawn by chance from a grammar of its arguments.

values         what is drawn in place of an argument or the value of a flag
calls          the calls of the library, with right arguments
command_lines  the commands and trainers, with their flags
outcome        how a use has ended, and whether somebody wrote that end
"""

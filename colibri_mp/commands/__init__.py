"""The verbs of `colibri-cluster`, a file for each or for a few that belong together.

A module's `register(verbs)` adds its parsers; a verb is a function of the parsed arguments that returns an exit code. The
command line must answer at once: a module imports at its top only the grammar (`arguments`), `terminal`, `connecting`,
`config` and `errors`, and the rest in its functions.
"""

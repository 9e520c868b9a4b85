"""A sweep file, read and checked: from YAML to plain values, with every mistake named at its line.

The package must not know tuners, and only `request`, which holds the executor, may load torch. Read `spec` first, what
comes of a file, then `reader` and `sweep_model` (the keys, as pydantic models); `domains` and `distributions` are the
parameters, `overrides` is `--set`, and `yaml_marks` remembers where values stood; `options` are the command line's, and
`request` is what a tuner is asked.
"""

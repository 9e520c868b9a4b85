"""A sweep file, read and checked: from YAML to plain values, with every mistake named at its line.

The package must not know tuners, and only `request`, which holds the executor, may load torch. Read `spec` first, the
result of reading, then `reader` and `sweep_model` (the keys, as pydantic models); `domains` and `distributions` are the
parameters, `messages` words the errors, `overrides` is `--set`, and `yaml_marks` remembers where values stood;
`options` are the command line's, and `request` goes to a tuner.

Note: a new key. A key of `hydra:` is a field in `sweep_model`, and is either listed among the executor's options in
`reader`, or a field of `spec`.
"""

"""Scripted runs of many sessions: `colibri-cluster script FILE`, described in docs/scripts.md.

    file ──▶ reading ──▶ checking ──▶ definition.Script ──▶ runner ──▶ transcript, report
             TOML, JSONL  the whole    what to run           one launch after another; in each, plays of sessions over
                          file first                         one connection, shown by progress

`play` is one run of one session without any input or output: it says which request comes next and takes the answer.
"""

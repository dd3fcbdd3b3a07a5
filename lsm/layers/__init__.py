"""One layer file: its bytes, mapping it, looking keys up in it, publishing it, and the merge of several sorted ones.

Above `model`, `platform` and `columnar`; nothing here knows which layers make a trace.
"""

"""A structural index of every place where an SGLang tree dispatches on, or describes, speculative decoding.

source → vocabulary → scan → cover: the files, what their classes and enums say the words mean, the sites, and what the
patch sets do there. Pure: no host, no patch sets of its own, no network.
"""

"""DDTREE for SGLang: server arguments, draft head and worker. Only the worker and the arguments import sglang."""

"""Pipeline parallelism: neighbouring ranks train consecutive layers, by torch.distributed.pipelining."""

"""The family of GPUs whose products are those of one warp (``mma.sync``): sm_75 to sm_121 but for sm_90a."""

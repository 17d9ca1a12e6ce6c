"""The family of GPUs whose products are those of four warps (``wgmma``): sm_90a."""

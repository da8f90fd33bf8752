"""Other libraries run on flashattn3: one module for each, and nothing here runs on its own.

``flashattn3.integrations.torch``         F.scaled_dot_product_attention, varlen_attn
``flashattn3.integrations.transformers``  attn_implementation="fa3"
``flashattn3.integrations.diffusers``     the attention backend "flashattn3"
``flashattn3.integrations.flash_attn_2``  code that imports flash_attn
``flashattn3.integrations.flash_attn_3``  code that imports flash_attn_interface
``flashattn3.integrations.vllm``          the attention backend CUSTOM of vLLM
``flashattn3.integrations.sglang``        the attention backend "flashattn3" of SGLang

Each imports its library only when its function is called. docs/integrations.md has the details.
"""

"""Our attention in models of other libraries, which are imported when they are used.

transformers  attention implementations "hilbert_window", "hilbert_dilated" and "hilbert_grid" for Hugging Face's
              transformers; replace_attention for Longformer, Swin and DiNAT
diffusers     windows for FLUX, HunyuanVideo, CogVideoX and Wan, text beside them; LTX-2.5's video decoder
natten        NATTEN's na1d, na2d, na3d and modules under NATTEN's names
torchscale    replace_attention for models of torchscale's LongNet such as Prov-GigaPath's, and to_torchscale back
"""

"""Sample pictures and films"""

from vllm.assets.image import ImageAsset

ImageAsset("cherry_blossom")

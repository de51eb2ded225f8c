"""Networks that turn pictures into vectors, which a decoder reads among its tokens.

    vision              Vision: patches, blocks, a projector
    projectors          what families of vision networks have of their own
    picture_attention   where the patches of a picture look
    vision_input        sizes, tiles and numbers of a picture, as a vision network gets them
"""

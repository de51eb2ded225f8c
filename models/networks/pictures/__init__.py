"""Networks that turn pictures and sounds into vectors, which a decoder reads among its tokens.

    senses              what sees and hears beside a decoder
    vision              Vision: patches, blocks, a projector
    hearing             Hearing: Whisper's encoder, a projector
    tower               the blocks of both
    mobilenet           MobileNet: Gemma 3n's, of convolutions
    conformer           Conformer: what hears for Gemma 4
    projector           what families of vision networks have in common
    square_projectors   families that get squares; sliced_projectors: slices; free_projectors: one field of any shape
    projectors          all of them, by the name in the file
    picture_attention   where the patches of a picture look
    vision_input        sizes and numbers of a picture, as a vision network gets them
    tiles               pictures cut into tiles
"""

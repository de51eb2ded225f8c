"""Speech to text: Whisper and Moonshine (networks/sounds/speech_network.py) on recordings of any length.

    m = ggjit.models.load_speech("ggml-base.bin")
    print(m.transcribe("talk.wav").text)

Read speech.py first.

    speech.py           load_speech, and what Whisper does with a sound; speech_model.py: what all models share
    moonshine.py        Moonshine: pieces of up to 30 s
    tokens.py           the vocabulary
    decoding.py         the tokens of one window
    transcription.py    the windows of a recording; transcript.py: what comes of them
    words.py            when each word was said
    streaming.py        sound that is coming in
    inside.py           pictures of what a model hears, and where it listens
"""

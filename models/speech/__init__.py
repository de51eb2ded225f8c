"""Speech to text: Whisper's network (networks/whisper.py) on recordings of any length.

    from ggjit.models import load_speech
    m = load_speech("ggml-base.bin")
    print(m.transcribe("talk.wav").text)

Read speech.py first.

    speech.py           load_speech, and what a model does with a sound
    mel.py              spectrograms
    tokens.py           the vocabulary
    decoding.py         the tokens of one window
    transcription.py    the windows of a recording; transcript.py: what comes of them
    words.py            when each word was said
    streaming.py        sound that is coming in
    inside.py           pictures of what a model hears, and where it listens
"""

"""Speech networks: speech to text, and voice detection.

    speech_network      an encoder hears a sound, a decoder writes what was said
    whisper, moonshine  two families of such networks
    silero              Silero VAD: a probability of speech for each window of sound
    speech              stretches of speech from these probabilities
"""

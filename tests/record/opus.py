"""Records Ogg Opus files of all modes with the samples that the reference decoder makes of them.

    python3 tests/record/opus.py        # needs numpy, and the programs opusenc, opusdec and ffmpeg with libopus

writes `tests/golden/opus/NAME.opus`, of voices and chords that are made here, and `samples.json` with every 97th sample that
`opusdec` decodes in floating point; samples count over all channels. ffmpeg has to agree by libopus, in 16 bits, but not by the decoder of its
own, which resamples narrow bands in another way.
"""

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from common import GOLDEN

RATE, SECONDS = 48000, 0.7
OWN = GOLDEN / "opus"
# opusenc's options; the mode that packets have: narrow and wide SILK, both with CELT, CELT of long and of short frames.
FILES = {
    "silk": (1, ["--bitrate", "8", "--framesize", "60"]),
    "hybrid": (1, ["--bitrate", "28", "--speech"]),
    "mono": (1, ["--bitrate", "64"]),
    "stereo": (2, ["--bitrate", "96"]),
    "short": (2, ["--bitrate", "32", "--framesize", "2.5", "--music"]),
    "surround": (6, ["--bitrate", "160"]),
}


def voice(channels):
    """Makes a gliding tone with overtones, syllables and breath; every channel is later than the one before."""
    time = np.arange(int(RATE * SECONDS)) / RATE
    noise = np.random.default_rng(5).standard_normal(len(time))
    made = []
    for channel in range(channels):
        late = time - 0.01 * channel
        phase = 2 * np.pi * (120 * late + 60 * late**2)
        tones = sum(np.sin(at * phase) / at for at in range(1, 20))
        made.append(0.25 * tones * np.sin(2 * np.pi * 3 * late) ** 2 + 0.01 * noise)
    return np.stack(made, axis=1)


def pcm(*command):
    return np.frombuffer(subprocess.run(command, check=True, capture_output=True).stdout, "<f4")


def main():
    OWN.mkdir(parents=True, exist_ok=True)
    recorded = []
    for name, (channels, options) in FILES.items():
        file = OWN / f"{name}.opus"
        with tempfile.TemporaryDirectory() as scratch:
            raw = Path(scratch) / "voice.raw"
            (np.clip(voice(channels), -1, 1) * 32767).astype("<i2").tofile(raw)
            encode = ["opusenc", "--quiet", "--serial", "7", "--discard-comments", "--raw", "--raw-chan", str(channels), "--raw-rate", str(RATE)]
            subprocess.run([*encode, *options, str(raw), str(file)], check=True, capture_output=True)
        samples = pcm("opusdec", "--quiet", "--float", "--rate", str(RATE), "--no-dither", str(file), "-")
        other = pcm("ffmpeg", "-v", "error", "-c:a", "libopus", "-i", str(file), "-f", "f32le", "-")
        if channels < 3:  # ffmpeg has another order of channels
            assert np.allclose(samples, other, rtol=0, atol=2e-5), (name, len(samples), len(other))
        recorded.append({"name": name, "channels": channels, "frames": len(samples) // channels,
                         "samples": [float(f"{value:.6g}") for value in samples[::97]]})
        print(name, file.stat().st_size, recorded[-1]["frames"], float(np.abs(samples).max()))
    (OWN / "samples.json").write_text("[\n" + ",\n".join(json.dumps(of) for of in recorded) + "\n]\n")


if __name__ == "__main__":
    main()

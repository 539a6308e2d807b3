//! Tests that the pixels equal libjpeg's, and that damage is treated in the same way.
//!
//! The test files were created from random coefficients; libjpeg-turbo's pixels were recorded as a hash.

use proptest::prelude::*;

use super::*;
use crate::media::fixtures::bytes_of_hex;
use crate::media::probe::read_jpeg_header;
use crate::media::shape::Strictness;

/// Sequential in three scans, 4:2:0.
const THREE_SCANS: &str = "\
     ffd8ffe000104a46494600010100000100010000ffdb0043000303030303030303030303030303030303030303030303\
     0303030303030303030303030303030303030303030303030303030303030303030303030303030303ffc00011080012\
     001303012200021100031100ffc4001f000000000c000000000000000000000000000102030405060708090a0bffc401\
     121000000000000000ff0000000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d\
     1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d\
     4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d\
     7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacad\
     aeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdd\
     dedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeffda0008010100003f00670979e6c1\
     1fc3c04d00292927c1cf8036001147e1e1e105804b6d55de1e124819007eceb4f05280199f0e17819d00890f0f0f0232\
     010b1287e27288e58803ffda0008010200003f005022e995aa7c90689f0134a5804481ad453dc7e1e00624da1000960c\
     ff0022c922373b24000fc212003fffda0008010300003f0074049fe1e14700194009890283c3c3ce8040d7851df0035e\
     6c03ffd9";

/// The same coefficients in arithmetic coding, with a restart after every unit.
const ARITHMETIC: &str = "\
     ffd8ffe000104a46494600010100000100010000ffdb0043000303030303030303030303030303030303030303030303\
     0303030303030303030303030303030303030303030303030303030303030303030303030303030303ffc90011080012\
     001303012200021100031100ffdd00040001ffda000c03010002000300003f00ff006412e2547ab2865fa0000512a291\
     a395b4dfa44bfd33d2f8f529e9ee5a80f5939c3bf69caec7ae8f5a704cd95dbafe28e9e0d90c2918ffd0fe96b7a36968\
     c000a147a98041e304799b4df0c5718f705a084209330376be1058d461c7467891b03859aba406a0ffd1ff008f950c00\
     04395c072bf56c140b5126571f3350a1d95e38ec2815636e87d38fa97722b0dcf97c6b7293b1dc0396cb7061c5708540\
     ffd2ff00bb8783c0e1d61cf06c6cc53239d772d604bae7225182856017563020bc6a5ffcec50d11c0e644c323b1b8506\
     ffd9";

/// The same coefficients in arithmetic coding, progressive.
const ARITHMETIC_PROGRESSIVE: &str = "\
     ffd8ffe000104a46494600010100000100010000ffdb0043000303030303030303030303030303030303030303030303\
     0303030303030303030303030303030303030303030303030303030303030303030303030303030303ffca0011080012\
     001303012200021100031100ffda000c03010002000300000001fec91d23798fee495e509829cef18d6a11f0edd6c315\
     fd62971c03d0b813ad3bacffda000801010001050268d17978ffda0008010100063f024bca92108c000093f3eb1b288f\
     a0e88bf2d9654e560cfc852aa520ffda000801020001050252d4cd1fe83b40ffda0008010200063f024e6dcc21601800\
     25f86f8be092b31242e94e859dffda00080103000105026af94339a0ffda0008010300063f024bc60000006f781687a0\
     135a40df3790ffda0008010100013f214bc600000000033ae5e742d6fa43cb244e4e2753604cffda0008010200013f21\
     57208ca2bcae0070c1028f6f2bc3c87956e040ffda0008010300013f2178d480000005222d3871a7fc143affda000c03\
     010002000300000010d0c83bbf06ffda0008010100013f104bc60000000008ef3e0e7bb012a943a9e797f225937cffda\
     0008010200013f104bc65a1d00005c5dfb9ccea22e6d9a6f80ffda0008010300013f1078d480000005222d4eff001ad4\
     543affd9";

/// A first component at half the size of the other components.
const CHROMA_FINER: &str = "\
     ffd8ffe000104a46494600010100000100010000ffdb0043000303030303030303030303030303030303030303030303\
     0303030303030303030303030303030303030303030303030303030303030303030303030303030303ffc00011080012\
     001303011100022200032200ffc4001f000000000c000000000000000000000000000102030405060708090a0bffc401\
     121000000000000000ff0000000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d\
     1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d\
     4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d\
     7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacad\
     aeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdd\
     dedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeffda000c03010002000300003f0067\
     0979e6c11fc3c04d0044af87878416012db557787849206401e87870bc0ce804487878781190074049fe1e1470019400\
     891149b42f063007c02265155447860c0149493e0e7c01cabad3c14a007e9086a9c489e14640213a50fc4e511cb1003e\
     356934a00538283c3c3ce8040d7851df0035e6c0227648156f802378292669c97a5e148e00d80042582248b0ff008782\
     9a007aa445ac887677c1c862c01b345d32b54f920d13e02694b0089035a8a7b8fc3c00c49b420025ade73c30b518047b\
     4202a0f848ccc8043f1b3b63144f0f06181a2100430782a5f811d00845f0e31e0e500391f0f063de5802ad14fe1e0640\
     0446833fc8b2488dcec90003f0848009844ab4166010bde1e7801a6f31e1e04704d0046de1429328c01fffd9";

/// Four components in arithmetic coding, a scan each, with restarts.
const FOUR_COMPONENTS: &str = "\
     ffd8ffe000104a46494600010100000100010000ffdb0043000303030303030303030303030303030303030303030303\
     0303030303030303030303030303030303030303030303030303030303030303030303030303030303ffc90014080012\
     001304011100021100031100041100ffdd00040002ffda0008010100003f00ff006412e2547ab2865fa0000512a291a3\
     95b4df4be8ffd0fe96b7a36968c000a147a980413d60ffd1d2cd024100000000001f233fbc00b47888682f3680ffd2ff\
     003bafc028a28107bffceb160e2055569eb6e3cd40ffd3ff008f950c0004395c072498a0ffda0008010200003f00d2ab\
     85aa0000000027a6b5566141fc1472d02649ffd0d16763ee6bb2888019bf512db2320518260000055daf90ffd1ff00ba\
     f0fdddb00661afccaba015c4587dac190a3524e7b024ffd2fe9d5c1cbc4000015365255dc1397a9da65d1772573bc7b3\
     0effd3d2bb4abe21655aa3a0000152b31f2eeefa20ffda0008010300003f00d2ba8d204690f677f0eb8996233c62558a\
     f380ffd0ff00b886d954f6000000208e415cc8ffd1d2ca6ff5d878c00000001cba578e5b5e7d4d97a87effd2d002182a\
     6576914054b498e525f22d8eb921d6857105ffd3d2751c8ceed010d44d00e058de35ae44a0ffda0008010400003f00d2\
     cc9afcc005035fa49ca97a0ccecf3a20a0ffd0d2aa034114386fb88005b776fcc4aa5145d6ffd1ff00b98b0460000e2e\
     c695ce13aeeb9c4c73006479535c80ffd2ff00e7367980ea07d587ca9a64a94fa936a7ad2dd8ffd3d2cf2c6432a1c171\
     713affd9";

/// Returns a pixel hash.
fn hash(image: &RgbImage) -> u32 {
    image.pixels.iter().fold(0, |hash: u32, &byte| hash.wrapping_mul(31).wrapping_add(byte.into()))
}

fn decoded(bytes: &[u8], strictness: Strictness) -> Result<RgbImage, DecodeError> {
    let mut image = RgbImage::default();
    let limits = ImageLimits { strictness, ..ImageLimits::default() };
    decode_into(bytes, &read_jpeg_header(bytes)?, &limits, &mut image)?;
    Ok(image)
}

#[test]
fn pixels_are_those_of_libjpeg() {
    let table = [
        (THREE_SCANS, 316_389_839),
        (ARITHMETIC, 316_389_839),
        (ARITHMETIC_PROGRESSIVE, 316_389_839),
        (CHROMA_FINER, 3_797_424_975),
        (FOUR_COMPONENTS, 2_498_874_550),
    ];
    for (place, (hex, expected)) in table.into_iter().enumerate() {
        let image = decoded(&bytes_of_hex(hex), Strictness::Strict).unwrap();
        assert_eq!((image.width, image.height, image.is_truncated), (19, 18, false));
        assert_eq!(hash(&image), expected, "file {place}");
    }
}

#[test]
fn every_cut_is_truncated_or_flagged() {
    for hex in [THREE_SCANS, ARITHMETIC_PROGRESSIVE, CHROMA_FINER] {
        let file = bytes_of_hex(hex);
        for length in 0..file.len() {
            assert!(decoded(&file[..length], Strictness::Standard).is_err(), "cut to {length}");
            if let Ok(image) = decoded(&file[..length], Strictness::Lenient) {
                assert!(image.is_truncated, "cut to {length}");
            }
        }
    }
}

#[test]
fn scans_that_are_missing_leave_their_component_gray() {
    let file = bytes_of_hex(THREE_SCANS);
    let scans: Vec<usize> = (0..file.len() - 1).filter(|&at| file[at..].starts_with(&[0xFF, 0xDA])).collect();
    let luma = [&file[..scans[1]], &[0xFF, 0xD9]].concat();
    assert!(decoded(&luma, Strictness::Strict).is_err());
    let image = decoded(&luma, Strictness::Standard).unwrap();
    assert!(image.is_truncated);
    assert!(image.pixels.chunks_exact(3).all(|pixel| pixel[0] == pixel[1] && pixel[1] == pixel[2]));
}

#[test]
fn surplus_bytes_are_damage_in_strict_mode_alone() {
    let file = bytes_of_hex(THREE_SCANS);
    let other = [&file[..file.len() - 2], b"surplus", &[0xFF, 0xD9]].concat();
    assert!(matches!(decoded(&other, Strictness::Strict), Err(DecodeError::Malformed { .. })));
    assert_eq!(decoded(&other, Strictness::Standard).unwrap(), decoded(&file, Strictness::Strict).unwrap());
}

#[test]
fn sampling_factors_without_a_whole_ratio_are_unsupported() {
    let mut file = bytes_of_hex(CHROMA_FINER);
    let frame = file.windows(2).position(|pair| pair == [0xFF, 0xC0]).unwrap();
    file[frame + 14] = 0x32;
    let refused = decoded(&file, Strictness::Lenient).unwrap_err().to_string();
    assert_eq!(refused, "unsupported jpeg: sampling factors 2 of 3, 2 of 2");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn mutated_files_never_panic(
        file in 0usize..5,
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let files = [THREE_SCANS, ARITHMETIC, ARITHMETIC_PROGRESSIVE, CHROMA_FINER, FOUR_COMPONENTS];
        let mut bytes = bytes_of_hex(files[file]);
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if read_jpeg_header(&bytes).is_ok_and(|header| header.width * header.height < 1 << 20) {
            let _ = decoded(&bytes, Strictness::Lenient);
        }
    }
}

use super::*;
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};

fn options(compression: Option<CompressionType>) -> IpcWriteOptions {
    IpcWriteOptions::default().try_with_compression(compression).unwrap()
}

/// Writes batches of 20 rows as a file or a stream.
fn written(is_file: bool, batch: &RecordBatch, compression: Option<CompressionType>) -> Vec<u8> {
    let (mut bytes, schema) = (Vec::new(), batch.schema());
    let batches = (0..batch.num_rows()).step_by(20).map(|at| batch.slice(at, 20.min(batch.num_rows() - at)));
    if is_file {
        let mut writer = FileWriter::try_new_with_options(&mut bytes, &schema, options(compression)).unwrap();
        batches.for_each(|batch| writer.write(&batch).unwrap());
        writer.finish().unwrap();
    } else {
        let mut writer =
            StreamWriter::try_new_with_options(&mut bytes, &schema, options(compression)).unwrap();
        batches.for_each(|batch| writer.write(&batch).unwrap());
        writer.finish().unwrap();
    }
    bytes
}

#[test]
fn arrow_files_and_streams_have_the_samples_that_packing_writes() {
    let place = tempfile::tempdir().unwrap();
    let mut numbered = 0;
    for is_file in [true, false] {
        for compression in [None, Some(CompressionType::ZSTD), Some(CompressionType::LZ4_FRAME)] {
            numbered += 1;
            let path = place.path().join(format!("{numbered}.arrow"));
            fs::write(&path, written(is_file, &rows(50), compression)).unwrap();
            let out = place.path().join(format!("out-{numbered}"));
            pack(&path, &out, &PackOptions::default()).unwrap();
            let ((read, bad), (packed, _)) = (scanned(&path), scanned(&out));
            assert!(bad.is_empty() && read.len() == 50, "{bad:?}");
            for (read, packed) in read.iter().zip(&packed) {
                assert_eq!(fields(read), fields(packed), "{is_file} {compression:?}");
            }
            let blocks: Vec<u64> =
                index(&path).unwrap().indexed_shards()[0].blocks.iter().map(|block| block.samples).collect();
            assert_eq!(blocks, [20, 20, 10]);
        }
    }
}

#[test]
fn values_of_dictionaries_are_read() {
    let place = tempfile::tempdir().unwrap();
    let keys = arrow_array::Int32Array::from(vec![Some(1), None, Some(0)]);
    let values = texts(["a", "b"].map(|text| Some(text.to_owned())));
    let batch = table(&[("caption", Arc::new(DictionaryArray::<Int32Type>::new(keys, values)))]);
    for is_file in [true, false] {
        let path = place.path().join(format!("{is_file}.arrow"));
        fs::write(&path, written(is_file, &batch, None)).unwrap();
        let (samples, bad) = scanned(&path);
        let rows: Vec<u64> = samples.iter().map(|sample| sample.offset).collect();
        assert_eq!((rows, bad.len()), (vec![0, 2], 1));
    }
}

#[test]
fn an_arrow_file_that_was_cut_is_one_fault_and_never_a_short_table() {
    let place = tempfile::tempdir().unwrap();
    for is_file in [true, false] {
        let bytes = written(is_file, &rows(50), None);
        for length in (8..bytes.len()).step_by(97).chain([bytes.len() - 8, bytes.len() - 1]) {
            let path = place.path().join("t.arrow");
            fs::write(&path, &bytes[..length]).unwrap();
            let (samples, bad) = scanned(&path);
            assert!(samples.is_empty() && bad.len() == 1, "{is_file}, {length} bytes: {bad:?}");
        }
    }
}

//! Matrix products with all transposes, types and epilogues, compared with f64 sums.

use crate::support::{
    Cuda, Numbers, code, cuda,
    product::{BF16, F32, Matrix, Product, epilogue},
};
use cudarc::{cublaslt::sys::cublasStatus_t, driver::DevicePtr};

const EPILOGUES: [u32; 12] = [
    epilogue::DEFAULT,
    epilogue::RELU,
    epilogue::BIAS,
    epilogue::RELU_BIAS,
    epilogue::GELU,
    epilogue::GELU_BIAS,
    epilogue::GELU_AUX,
    epilogue::GELU_AUX_BIAS,
    epilogue::DGELU,
    epilogue::DGELU_BGRAD,
    epilogue::BGRADA,
    epilogue::BGRADB,
];

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh())
}

/// The slope of [`gelu`], by a central difference.
fn gelu_slope(x: f64) -> f64 {
    (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5
}

/// What a product must write.
struct Expected {
    d: Vec<f64>,
    bias: Option<Vec<f64>>,
    aux: Option<Vec<f64>>,
}

struct Inputs {
    a: Numbers,
    b: Numbers,
    c: Numbers,
    bias: Numbers,
    aux: Numbers,
}

#[expect(clippy::many_single_char_names, reason = "the names of the matrices and their sizes")]
fn expected(product: &Product, inputs: &Inputs) -> Expected {
    let (m, n, k) = (product.m, product.n, product.k);
    let a = |i: usize, l: usize| inputs.a.at(product.a.index(i, l));
    let b = |l: usize, j: usize| inputs.b.at(product.b.index(l, j));
    // Elements between lines are not written, regardless of their values.
    let (mut d, mut aux) = (vec![f64::NAN; product.d.elements()], vec![f64::NAN; product.aux_leading * n]);
    let kind = product.epilogue;
    for j in 0..n {
        for i in 0..m {
            let sum: f64 = (0..k).map(|l| a(i, l) * b(l, j)).sum();
            let mut value =
                f64::from(product.alpha) * sum + f64::from(product.beta) * inputs.c.at(product.d.index(i, j));
            if [epilogue::BIAS, epilogue::RELU_BIAS, epilogue::GELU_BIAS, epilogue::GELU_AUX_BIAS]
                .contains(&kind)
            {
                value += inputs.bias.at(i);
            }
            aux[j * product.aux_leading + i] = value;
            d[product.d.index(i, j)] = match kind {
                epilogue::RELU | epilogue::RELU_BIAS => value.max(0.0),
                epilogue::GELU | epilogue::GELU_BIAS | epilogue::GELU_AUX | epilogue::GELU_AUX_BIAS => {
                    gelu(value)
                }
                epilogue::DGELU | epilogue::DGELU_BGRAD => {
                    value * gelu_slope(inputs.aux.at(j * product.aux_leading + i))
                }
                _ => value,
            };
        }
    }
    let bias = match kind {
        epilogue::BGRADA => Some((0..m).map(|i| (0..k).map(|l| a(i, l)).sum()).collect()),
        epilogue::BGRADB => Some((0..n).map(|j| (0..k).map(|l| b(l, j)).sum()).collect()),
        epilogue::DGELU_BGRAD => {
            Some((0..m).map(|i| (0..n).map(|j| d[product.d.index(i, j)]).sum()).collect())
        }
        _ => None,
    };
    let has_aux = [epilogue::GELU_AUX, epilogue::GELU_AUX_BIAS].contains(&kind);
    Expected { d, bias, aux: has_aux.then_some(aux) }
}

fn is_close(what: &str, got: &Numbers, expected: &[f64]) {
    let tolerance = if matches!(got, Numbers::Bf16(_)) { 8e-3 } else { 2e-5 };
    for (i, expected) in expected.iter().enumerate().filter(|(_, expected)| !expected.is_nan()) {
        let error = (got.at(i) - expected).abs();
        assert!(error <= tolerance * (1.0 + expected.abs()), "{what} {i}: {} for {expected}", got.at(i));
    }
}

fn check(cuda: &Cuda, product: &Product) {
    let stream = cuda.context.default_stream();
    let numbers = |is_bf16, length, seed| Numbers::random(is_bf16, length, seed);
    let (input, output) = (product.input == BF16, product.output == BF16);
    let inputs = Inputs {
        a: numbers(input, product.a.elements(), 1),
        b: numbers(input, product.b.elements(), 2),
        c: numbers(output, product.d.elements(), 3),
        bias: numbers(output, product.m.max(product.n), 4),
        aux: numbers(output, product.aux_leading * product.n, 5),
    };
    let a = inputs.a.upload(&stream);
    let b = inputs.b.upload(&stream);
    let c = inputs.c.upload(&stream);
    let d = Numbers::random(output, product.d.elements(), 6).upload(&stream);
    let (bias, aux) = (inputs.bias.upload(&stream), inputs.aux.upload(&stream));
    let workspace = stream.alloc_zeros::<u8>(4 << 20).unwrap();
    let pointers = [&a, &b, &c, &d, &bias, &aux].map(|buffer| buffer.device_ptr(&stream).0);
    product.run(&stream, pointers, &workspace).unwrap_or_else(|status| panic!("{product:?}: {status:?}"));
    let expected = expected(product, &inputs);
    is_close("D", &Numbers::download(output, &stream, &d), &expected.d);
    if let Some(sums) = expected.bias {
        is_close("bias", &Numbers::download(output, &stream, &bias), &sums);
    }
    if let Some(values) = expected.aux {
        is_close("aux", &Numbers::download(output, &stream, &aux), &values);
    }
}

#[test]
fn products_are_right_with_all_transposes_types_and_epilogues() {
    let Some(cuda) = cuda() else { return };
    for (input, output) in [(F32, F32), (BF16, F32), (BF16, BF16)] {
        for transposes in 0..4 {
            for epilogue in EPILOGUES {
                let product = Product::new(37, 23, 45, transposes & 1 != 0, transposes & 2 != 0)
                    .types(input, output)
                    .epilogue(epilogue);
                check(&cuda, &product);
            }
        }
    }
    assert_eq!(cuda.counts().matrix_products, 3 * 4 * 12);
}

#[test]
fn products_are_right_by_rows_with_alpha_and_beta() {
    let Some(cuda) = cuda() else { return };
    for transposes in 0..4 {
        let mut product = Product::new(70, 9, 600, transposes & 1 != 0, transposes & 2 != 0);
        product.a = Matrix { is_by_rows: true, leading: 700, ..product.a };
        product.b = Matrix { is_by_rows: true, leading: 640, ..product.b };
        product.d = Matrix { is_by_rows: true, leading: 16, ..product.d };
        (product.alpha, product.beta) = (0.5, -2.0);
        check(&cuda, &product);
    }
}

#[test]
fn a_slice_of_rows_has_the_same_bits() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let k = 1500;
    let a = Numbers::random(true, 100 * k, 1).upload(&stream);
    let b = Numbers::random(true, 50 * k, 2).upload(&stream);
    let workspace = stream.alloc_zeros::<u8>(4 << 20).unwrap();
    // Weights are the first factor, by columns; tokens are columns of the second.
    let run = |m: usize, first: usize, n: usize| {
        let d = Numbers::random(false, m * n, 3).upload(&stream);
        let pointer = |buffer: &cudarc::driver::CudaSlice<u8>| buffer.device_ptr(&stream).0;
        let tokens = pointer(&b) + 2 * (first * k) as u64;
        let product = Product::new(m, n, k, true, false).types(BF16, F32);
        product.run(&stream, [pointer(&a), tokens, pointer(&d), pointer(&d), 0, 0], &workspace).unwrap();
        Numbers::download(false, &stream, &d)
    };
    let all = run(100, 0, 50);
    for (m, first, n) in [(100, 17, 1), (33, 4, 11), (1, 0, 50)] {
        let part = run(m, first, n);
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let (got, expected) = (part.at(j * m + i), all.at((first + j) * 100 + i));
            assert_eq!(got.to_bits(), expected.to_bits(), "{m} {first} {n}");
        }
    }
}

#[test]
fn misuse_is_refused() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let buffer = stream.alloc_zeros::<u8>(1 << 16).unwrap();
    let workspace = stream.alloc_zeros::<u8>(4 << 20).unwrap();
    let at = buffer.device_ptr(&stream).0;
    let pointers = [at, at + 4096, at + 8192, at + 8192, at + 12288, at + 16384];
    let mut product = Product::new(16, 16, 16, false, false).types(BF16, BF16);
    assert_eq!(product.run(&stream, pointers, &workspace), Ok(()));
    let mut unaligned = pointers;
    unaligned[0] += 2;
    let refused = product.run(&stream, unaligned, &workspace);
    assert_eq!(refused, Err(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED), "A is not aligned");
    product.epilogue = epilogue::GELU_AUX;
    product.aux_leading = 20;
    let refused = product.run(&stream, pointers, &workspace);
    assert_eq!(refused, Err(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED), "lines of the auxiliary output");
    product.aux_leading = 16;
    let mut unaligned = pointers;
    unaligned[5] += 8;
    let refused = product.run(&stream, unaligned, &workspace);
    assert_eq!(refused, Err(cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE), "the auxiliary output");
    assert_eq!(code(stream.synchronize()), 0);
}

#[test]
fn an_operand_beyond_its_buffer_is_an_illegal_address() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let buffer = stream.alloc_zeros::<u8>(2048).unwrap();
    let short = stream.alloc_zeros::<u8>(16 * 16 * 4 - 4).unwrap();
    let workspace = stream.alloc_zeros::<u8>(4 << 20).unwrap();
    let (at, end) = (buffer.device_ptr(&stream).0, short.device_ptr(&stream).0);
    let product = Product::new(16, 16, 16, false, false);
    assert_eq!(product.run(&stream, [at, at + 1024, end, end, 0, 0], &workspace), Ok(()));
    assert_eq!(code(stream.synchronize()), crate::support::ILLEGAL_ADDRESS);
}

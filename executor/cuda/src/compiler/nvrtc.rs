//! NVRTC calls.

#![expect(unsafe_code, reason = "the compiler is called through C functions")]

use std::ffi::{CStr, CString, c_char};

use cudarc::nvrtc::sys::{self, nvrtcResult};

use crate::error::{Error, Result};
use crate::libraries::nvrtc;

/// Returns the version, major and minor.
pub(super) fn version() -> Result<(u32, u32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the pointers are to local variables.
    let status = unsafe { (nvrtc().nvrtcVersion)(&raw mut major, &raw mut minor) };
    check("nvrtcVersion", status)?;
    Ok((major as u32, minor as u32))
}

/// Compiles a source to a cubin; sources and headers are pairs of name and text.
pub(super) fn compile(
    source: (&'static str, &str),
    headers: &[(&str, &str)],
    options: &[String],
) -> Result<Vec<u8>> {
    let program = Program::new(source, headers)?;
    let options = strings(options.iter().map(String::as_str));
    let pointers = pointers(&options);
    // SAFETY: the program is alive, and the options end with zeros.
    let status =
        unsafe { (nvrtc().nvrtcCompileProgram)(program.0, pointers.len() as i32, pointers.as_ptr()) };
    if status != nvrtcResult::NVRTC_SUCCESS {
        let log = program.log().unwrap_or_default();
        let log = if log.trim().is_empty() { message(status) } else { log.trim().to_owned() };
        return Err(Error::Compile { file: source.0, log });
    }
    program.cubin()
}

/// Compiler program.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created once.
        let _ = unsafe { (nvrtc().nvrtcDestroyProgram)(&raw mut self.0) };
    }
}

impl Program {
    fn new((file, text): (&str, &str), headers: &[(&str, &str)]) -> Result<Self> {
        let [text, file] = [text, file].map(string);
        let (names, texts): (Vec<&str>, Vec<&str>) = headers.iter().copied().unzip();
        let (names, texts) = (strings(names), strings(texts));
        let (names, texts) = (pointers(&names), pointers(&texts));
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings end with zeros and live during the call, which copies them.
        let status = unsafe {
            (nvrtc().nvrtcCreateProgram)(
                &raw mut program,
                text.as_ptr(),
                file.as_ptr(),
                names.len() as i32,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        check("nvrtcCreateProgram", status)?;
        Ok(Self(program))
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program is alive, and the pointer is to a local variable.
        check("nvrtcGetCUBINSize", unsafe { (nvrtc().nvrtcGetCUBINSize)(self.0, &raw mut len) })?;
        let mut code = vec![0_u8; len];
        // SAFETY: the buffer has the length that the compiler returned.
        check("nvrtcGetCUBIN", unsafe { (nvrtc().nvrtcGetCUBIN)(self.0, code.as_mut_ptr().cast()) })?;
        Ok(code)
    }

    fn log(&self) -> Result<String> {
        let mut len = 0;
        // SAFETY: the program is alive, and the pointer is to a local variable.
        check("nvrtcGetProgramLogSize", unsafe { (nvrtc().nvrtcGetProgramLogSize)(self.0, &raw mut len) })?;
        let mut log = vec![0_u8; len];
        // SAFETY: the buffer has the length that the compiler returned.
        check("nvrtcGetProgramLog", unsafe {
            (nvrtc().nvrtcGetProgramLog)(self.0, log.as_mut_ptr().cast())
        })?;
        // the length counts the zero at the end
        Ok(String::from_utf8_lossy(log.strip_suffix(&[0]).unwrap_or(&log)).into_owned())
    }
}

fn string(text: &str) -> CString {
    CString::new(text).expect("sources and options have no zeros")
}

fn strings<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<CString> {
    texts.into_iter().map(string).collect()
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}

fn message(status: nvrtcResult) -> String {
    // SAFETY: the function returns a constant string.
    unsafe { CStr::from_ptr((nvrtc().nvrtcGetErrorString)(status)) }.to_string_lossy().into_owned()
}

fn check(call: &'static str, status: nvrtcResult) -> Result<()> {
    if status == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    Err(Error::Driver { call, code: format!("{status:?}"), reason: message(status) })
}

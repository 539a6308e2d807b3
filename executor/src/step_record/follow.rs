//! Reads a record while it grows.

use std::fs::{self, File};
use std::io::{self, BufReader, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::line::Line;
use super::read_line;
use dflop_loader::store::file;

/// Reads the lines of a record as they are written.
#[derive(Debug)]
pub struct Follower {
    path: PathBuf,
    /// Inode of the file that was read.
    inode: u64,
    /// Length of the complete lines that were read.
    read_bytes: u64,
    /// The last of these lines, which a resumed run may have replaced.
    last: Vec<u8>,
}

/// What a [`Follower`] found.
#[derive(Debug, Default)]
pub struct News {
    /// Whether lines that were read before are gone: the lines that follow are all there are.
    pub is_restarted: bool,
    pub lines: Vec<Line>,
}

impl Follower {
    /// Follows a file, which need not exist yet.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), inode: 0, read_bytes: 0, last: Vec::new() }
    }

    /// Returns the complete lines since the last call; none if there is no file.
    ///
    /// # Errors
    /// Of the file system; [`io::ErrorKind::InvalidData`] for a record of another version.
    pub fn read(&mut self) -> io::Result<News> {
        let mut news = News::default();
        let file = match file::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(news),
            file => file?,
        };
        let about = file.metadata()?;
        if about.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let mut reader = BufReader::with_capacity(1 << 16, file);
        if !self.goes_on(&about, &mut reader)? {
            news.is_restarted = self.read_bytes > 0;
            (self.inode, self.read_bytes) = (about.ino(), 0);
        }
        reader.seek(SeekFrom::Start(self.read_bytes))?;
        let mut line = Vec::new();
        loop {
            let bytes = read_line(&mut reader, &mut line)?;
            if line.last() != Some(&b'\n') {
                return Ok(news);
            }
            self.read_bytes += bytes as u64;
            self.last.clone_from(&line);
            let parsed = Line::parse(&String::from_utf8_lossy(&line));
            news.lines.extend(parsed.map_err(|reason| io::Error::new(io::ErrorKind::InvalidData, reason))?);
        }
    }

    /// Checks that the lines that were read are still there: a new run replaces the file, a resumed one cuts
    /// it.
    fn goes_on(&self, about: &fs::Metadata, reader: &mut BufReader<File>) -> io::Result<bool> {
        if self.inode != about.ino() || about.len() < self.read_bytes {
            return Ok(false);
        }
        reader.seek(SeekFrom::Start(self.read_bytes - self.last.len() as u64))?;
        let mut line = vec![0; self.last.len()];
        io::Read::read_exact(reader, &mut line)?;
        Ok(line == self.last)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn steps(news: &News) -> Vec<u64> {
        let step = |line: &Line| if let Line::Step(step) = line { Some(step.step) } else { None };
        news.lines.iter().filter_map(step).collect()
    }

    #[test]
    fn lines_are_read_once_complete_and_again_after_they_were_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("steps.jsonl");
        let mut follower = Follower::new(&path);
        assert!(follower.read().unwrap().lines.is_empty());
        let mut file = File::create(&path).unwrap();
        let line = |step: u64| format!("{{\"step\":{step},\"seconds\":1.0}}\n");
        file.write_all((line(0) + &line(1) + "{\"step\":2,").as_bytes()).unwrap();
        let news = follower.read().unwrap();
        assert_eq!((steps(&news), news.is_restarted), (vec![0, 1], false));
        file.write_all(b"\"seconds\":1.0}\n").unwrap();
        assert_eq!(steps(&follower.read().unwrap()), [2]);
        assert!(follower.read().unwrap().lines.is_empty());
        // cut by a resumed run, and longer again before it is looked at
        fs::write(
            &path,
            line(0) + &line(1).replace("1.0", "2.5") + &line(2).replace("1.0", "7.5") + &line(3),
        )
        .unwrap();
        let news = follower.read().unwrap();
        assert_eq!((steps(&news), news.is_restarted), (vec![0, 1, 2, 3], true));
        fs::remove_file(&path).unwrap();
        fs::write(&path, line(0)).unwrap();
        let news = follower.read().unwrap();
        assert_eq!((steps(&news), news.is_restarted), (vec![0], true));
        fs::write(&path, "{\"format\":\"dflop-steps\",\"version\":9}\n").unwrap();
        assert!(follower.read().unwrap_err().to_string().contains("found version 9"));
        assert!(Follower::new(directory.path()).read().is_err());
        fs::write(&path, line(0) + &"x".repeat(3 << 20)).unwrap();
        let error = Follower::new(&path).read().unwrap_err().to_string();
        assert_eq!(error, "expected lines of steps, found one of more than 1048576 bytes");
    }
}

package chaos

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// docs/failures.md says which test shows what: those tests and faults must be there.
func TestFailuresAreShownByWhatExists(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..")
	page, err := os.ReadFile(filepath.Join(root, "docs", "failures.md"))
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	tests := make(map[string]bool)
	err = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(source, -1) {
			tests[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range regexp.MustCompile(`\b(?:Test|Fuzz)[A-Z]\w+`).FindAllString(string(page), -1) {
		if !tests[name] {
			t.Errorf("docs/failures.md names %s, which does not exist", name)
		}
	}

	var names []string
	for _, f := range faults {
		names = append(names, f.name)
	}
	for _, m := range regexp.MustCompile(`chaos: ([^;|]+)`).FindAllStringSubmatch(string(page), -1) {
		for name := range strings.SplitSeq(m[1], ", ") {
			// A comment may follow the fault's name: ", where the exit code must be 0".
			if name = strings.TrimSpace(name); !slices.Contains(names, name) && !slices.Contains(remarks, name) {
				t.Errorf("docs/failures.md names the fault %q, which does not exist", name)
			}
		}
	}
	for n := 1; n <= 70; n++ {
		if row := fmt.Sprintf("| S%02d |", n); !strings.Contains(string(page), row) {
			t.Errorf("docs/failures.md has no row %s", row)
		}
	}
}

// remarks are what the page says of the chaos suite besides the names of faults.
var remarks = []string{"all faults", "two writers commit late in every round", "where the exit code must be 0", "where events must flow"}

